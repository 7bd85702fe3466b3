from trainer.recipe.reading import load_recipe as load_recipe
from trainer.run.train import run_recipe as run_recipe
