"""Score a model's answers to questions about images: tasks, metrics, confidence intervals, and a page of failures."""
