"""Looking into converted models: reports, explanations, counts and checks."""
