"""What heads are calibrated and measured on: prompts, which a model answers itself: that is what it will draft."""

__all__ = ["CALIBRATION", "HELD_OUT"]

CALIBRATION = (
    "Explain how a bicycle stays upright, in simple words.",
    "Write a Python class for a bank account with deposit, withdraw and a history.",
    "Translate to French: The library opens at nine and closes at six.",
    "Give me five ideas for a quick dinner with rice.",
    "What is the difference between TCP and UDP?",
    "Write a short poem about rain in the city.",
    "Summarise the causes of the French Revolution in four sentences.",
    "Solve step by step: a train travels 180 km in 2.5 hours. How fast is it?",
    "Write a SQL query that finds the three customers with the most orders.",
    "Erkläre, warum der Himmel blau ist.",
    "Write a polite letter that asks a landlord to repair a window.",
    "Schreibe eine JavaScript-Funktion, die ein Array ohne doppelte Einträge zurückgibt.",
    "List the planets of the solar system with one fact about each.",
    "What should I check before I buy a used car?",
    "Write a bash script that renames all .jpeg files in a folder to .jpg.",
    "Describe a market in the morning.",
    "¿Qué es la fotosíntesis?",
    "Continue the story: The lighthouse keeper heard a knock at three in the morning.",
    "Write a unit test for a function that parses dates such as 2024-02-29.",
    "Compare renting and buying a home in a table.",
    "请用三句话介绍长城。",
    "What is 47 times 36? Show the calculation.",
    "Write the JSON of a user with a name, an e-mail address and two roles.",
    "How does a vaccine work?",
)

HELD_OUT = (
    "Explain what a hash table is and when it is slow.",
    "Write a short story about two neighbours and a tree.",
    "Write a Python function that merges two sorted lists.",
    "What are the advantages and disadvantages of electric cars?",
    "Give me a packing list for a week in the mountains.",
    "Rewrite in formal English: hey, can't make it today, sorry!",
    "What is the capital of Australia, and why is it not Sydney?",
    "Plan a day in Lisbon for a family with two children.",
)
