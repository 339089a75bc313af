"""`logpast explore`: a text in the browser, token by token, with what the model's past contributes to each."""
