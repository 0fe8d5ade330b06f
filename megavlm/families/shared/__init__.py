"""Code that several families share: tables of weights, settings, chat templates, and inputs of Transformers."""
