from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0024_adapters'),
    ]

    operations = [
        migrations.AlterField(
            model_name='model',
            name='task',
            field=models.CharField(choices=[('generate', 'Generate text'), ('transcription', 'Transcribe speech'), ('embed', 'Embed texts'), ('token_embed', 'Embed tokens'), ('classify', 'Classify texts'), ('token_classify', 'Classify tokens'), ('score', 'Score and rerank pairs of texts')], default='generate', error_messages={'invalid_choice': '%(value)r is no task; there are: generate, transcription, embed, token_embed, classify, token_classify, score.'}, help_text="What its servers do, by vLLM's names: it decides which calls it serves.", max_length=16),
        ),
    ]
