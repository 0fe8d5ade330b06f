"""The configuration: `schema` declares it, `cli.parse` reads it, `rules.check` validates it, `resolve` fills it in."""
