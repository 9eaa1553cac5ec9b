"""Making and loading synthetic examples."""
