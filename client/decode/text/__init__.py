"""Converts text to tokens and back, exactly as in the model's training, and chats to prompts in the model's format."""
