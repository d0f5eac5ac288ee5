"""Token mixers: softmax attention and gated delta net, with the state each carries."""
