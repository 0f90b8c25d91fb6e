"""What runs on CPUs: attention by products or compiled, products on packed weights, C++ compiled where it runs."""
