"""Set the shares of elastic workers so that requests keep the limits of their times."""
