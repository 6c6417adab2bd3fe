"""The helpers that tests of every kind share: models, clusters, peers, and ways to harm them."""
