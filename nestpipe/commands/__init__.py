"""One module per subcommand of ``nestpipe``: each has ``main(arguments) -> exit status``."""
