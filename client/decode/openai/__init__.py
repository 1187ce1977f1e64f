"""A decode engine's HTTP face: OpenAI's completions and chat completions."""
