"""What makes scores better than a model will be: groups, an order of time, columns that give the label away."""
