"""The processes that train together: what they tell each other, and weights that they share."""
