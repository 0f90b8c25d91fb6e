"""Placement of casts: what is pinned, and a minimum cut, or torch.autocast's rules, for the rest."""
