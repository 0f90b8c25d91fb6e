"""Classes and methods that a forward goes through, and what replaces them."""

from __future__ import annotations

import torch
from torch import nn

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Net, Two, net

CASES = case = Cases("classes")


@case
def static_method_and_class_method(t: Run):
    class M(Net):
        k = 2.0

        @staticmethod
        def up(x):
            return x * 3

        @classmethod
        def scale(cls, x):
            return x / cls.k

        def forward(self, x):
            return self.scale(self.up(self.l(x)))

    t.changes(M(), lambda m: setattr(M, "k", 0.1), lambda m: setattr(M, "up", staticmethod(lambda x: x - 1)))


@case
def method_replaced_in_the_class(t: Run):
    class M(Two):
        def attend(self, x):
            return torch.relu(x)

        def forward(self, x):
            return self.r(self.attend(self.l(x)))

    t.changes(M(), lambda m: setattr(M, "attend", lambda self, x: x * 3))


@case
def method_replaced_in_a_base(t: Run):
    class Base(Two):
        def attend(self, x):
            return torch.relu(x)

    class M(Base):
        def attend(self, x):
            return super().attend(x) + 1

        def forward(self, x):
            return self.r(self.attend(self.l(x)))

    t.changes(M(), lambda m: setattr(Base, "attend", lambda self, x: x * 3))


@case
def method_replaced_in_the_instance(t: Run):
    class M(Two):
        def attend(self, x):
            return torch.relu(x)

        def forward(self, x):
            return self.r(self.attend(self.l(x)))

    t.changes(M(), lambda m: setattr(m, "attend", lambda x: x * 3), lambda m: delattr(m, "attend"))


@case
def method_of_a_child_replaced(t: Run):
    class Child(nn.Module):
        def mix(self, x):
            return x * 2

        def forward(self, x):
            return self.mix(x)

    m = net(lambda s, x: s.child(s.l(x)))
    m.child = Child()
    t.changes(m, lambda m: setattr(Child, "mix", lambda self, x: x - 3))


@case
def forward_of_the_class_replaced(t: Run):
    class M(Net):
        pass

    t.changes(M(), lambda m: setattr(M, "forward", lambda self, x: self.l(x) * 3))


@case
def class_of_a_child_replaced(t: Run):
    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 3

    t.changes(Two(), lambda m: setattr(m.l, "__class__", Other))
