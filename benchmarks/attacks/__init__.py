"""What attackers can do to another client: its waits and its rate under each attack beside those without."""
