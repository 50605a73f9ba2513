"""The wire formats clients speak, each a pure translation to jobs and back. Knows no sockets and no engine."""
