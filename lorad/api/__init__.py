"""The two HTTP applications, and the sockets they listen on."""
