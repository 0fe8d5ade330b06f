"""The configuration: every option is declared here, with what follows from it alone."""
