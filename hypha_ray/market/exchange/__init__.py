"""The exchange of a cluster: an optional actor that says how many workers each of several competing runs may hold."""
