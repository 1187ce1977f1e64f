"""The contract between broker, zygote and session: messages, control pages, tokens. Imports none of the three."""
