"""A decode engine's HTTP interface: OpenAI's completions and chat completions."""
