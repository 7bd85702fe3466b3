from decoding.conversation import Conversation as Conversation
from decoding.generate import DecodingConfig as DecodingConfig
from decoding.generate import Engine as Engine
from decoding.headstart_model import HeadstartModel as HeadstartModel
from decoding.rules.sampling import SamplingConfig as SamplingConfig
from decoding.speculation import speculate as speculate
