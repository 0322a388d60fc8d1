"""One widget a file, each with its JavaScript and style sheet beside it."""
