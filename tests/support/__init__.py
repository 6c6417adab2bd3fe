"""What tests of every kind share: models, clusters, peers and the ways to harm them."""
