"""Parts that every pass needs of a graph: annotations, text, casts, copies."""
