"""Answer questions with a trained model, through Transformers on its exported folder."""
