"""What broker, zygote and session agree on: messages, control pages, tokens. Imports none of the three."""
