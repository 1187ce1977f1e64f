"""Converts text to tokens and back, exactly as the model was trained, and chats to prompts in the model's format."""
