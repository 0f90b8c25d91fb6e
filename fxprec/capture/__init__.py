"""From a user's forward to a graph of it: by static tracing, or by torch._dynamo; and what both need."""
