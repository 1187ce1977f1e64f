"""What broker, zygote and session agree on. It imports none of them."""
