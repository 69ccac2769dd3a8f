from sparkring import data as data
from sparkring.api import Recipe as Recipe
from sparkring.api import Run as Run
from sparkring.api import launch as launch
from sparkring.api import run as run

PUBLIC: dict[str, str]
