"""The HTTP face that the gateway and the model server share."""
