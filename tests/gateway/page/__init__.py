"""The inspector page, tried in a real browser as a person would."""
