"""What a user types: flags, recipes, and the words of other trainers. All commands end a mistake in one line."""
