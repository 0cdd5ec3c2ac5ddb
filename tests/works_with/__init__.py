"""Training with other libraries: each row of docs/works-with.md is held by a test."""
