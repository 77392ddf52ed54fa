"""Workers on other machines: the context that starts them, and the handshake on their connections."""
