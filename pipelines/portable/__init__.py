"""A registered model that goes anywhere: its code, its requirements and a sample travel with it."""
