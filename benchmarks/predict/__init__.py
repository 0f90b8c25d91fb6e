"""A model of time: how long a kernel takes on a GPU that is not there, from its compiled code and its shapes."""
