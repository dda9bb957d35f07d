"""What other people's files say: config.json and its dialects, weights, tokenizers, hub ids."""
