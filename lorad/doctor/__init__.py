"""What `loractl doctor` looks at, one module a part of the machine; none needs a daemon."""
