"""The control channel: frames, TLS, server and client; and Horovod's rendezvous through it."""
