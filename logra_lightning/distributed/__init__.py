"""The processes that train together, and weights of which each holds a part."""
