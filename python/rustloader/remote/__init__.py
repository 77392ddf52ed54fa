"""Workers on other machines: the context that starts them, and the handshake of their connections."""
