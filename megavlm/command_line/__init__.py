"""Parse command lines, recipes and configurations of other trainers. Commands report a user's error in one line."""
