"""From logits to tokens: settings of a request, penalties, and draws with counted noise."""
