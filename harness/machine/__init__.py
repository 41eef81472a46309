"""Facts about this machine. Every path is under an injectable root."""
