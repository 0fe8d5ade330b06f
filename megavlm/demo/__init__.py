"""The demo: questions about handwritten digits, its recipe and its report."""
