"""What the steps of a job share: its context, and the dataset that is found or built."""
