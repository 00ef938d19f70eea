"""The `micronorm` command: parse, call, print."""
