"""Model folders: tokenizers and chat templates."""
