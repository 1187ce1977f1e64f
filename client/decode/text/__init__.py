"""Text to tokens and back, as the model's authors did it; and chats as their models read them."""
